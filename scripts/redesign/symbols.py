import ast,pathlib,subprocess
root=pathlib.Path("/work/wt/w31")
files=subprocess.run(["git","ls-files","*.py"],cwd=root,text=True,capture_output=True).stdout.split()
files=[f for f in files if (root/f).exists()]
trees={"0.5.9":["python","python/engines/0.5.9"],"0.5.23":["python","python/engines/0.5.23"]}
mods={}
for f in files:
    for pre in ("python/engines/0.5.9/","python/engines/0.5.23/","python/","test/support/","test/serving/","test/unit/","test/tool/","scripts/"):
        if f.startswith(pre): mods.setdefault(f[len(pre):-3].replace("/",".").removesuffix(".__init__"),[]).append(f); break
def top(f):
    t=ast.parse((root/f).read_text()); s=set()
    for n in ast.walk(t):
        if isinstance(n,(ast.FunctionDef,ast.ClassDef,ast.AsyncFunctionDef)): s.add(n.name)
        elif isinstance(n,ast.Assign):
            for x in n.targets:
                for y in ast.walk(x):
                    if isinstance(y,ast.Name): s.add(y.id)
        elif isinstance(n,ast.AnnAssign) and isinstance(n.target,ast.Name): s.add(n.target.id)
        elif isinstance(n,(ast.Import,ast.ImportFrom)):
            for a in n.names: s.add((a.asname or a.name).split(".")[0])
    return s
cache={}
for f in files:
    t=ast.parse((root/f).read_text())
    tc=set()
    for n in ast.walk(t):
        if isinstance(n,ast.If) and "TYPE_CHECKING" in ast.unparse(n.test):
            for k in ast.walk(n): tc.add(k)
    for n in ast.walk(t):
        if not isinstance(n,ast.ImportFrom) or n in tc: continue
        m=n.module
        if n.level:
            parts=f[:-3].split("/")[:-n.level]; 
            pre="/".join(parts)
            cand=[g for g in files if g in (pre+"/"+(m or "").replace(".","/")+".py", pre+"/"+(m or "").replace(".","/")+"/__init__.py")]
        else: cand=mods.get(m or "",[])
        if not cand: continue
        for a in n.names:
            if a.name=="*": continue
            ok=False
            for c in cand:
                if c not in cache: cache[c]=top(c)
                ok|=a.name in cache[c] or any(k==f"{m}.{a.name}" for k in mods)
            if not ok: print(f,m,a.name)
print("-- module attributes")
for f in files:
    t=ast.parse((root/f).read_text()); names={}
    for n in ast.walk(t):
        if isinstance(n,ast.ImportFrom) and n.module and not n.level:
            for a in n.names:
                k=f"{n.module}.{a.name}"
                if k in mods: names[a.asname or a.name]=mods[k]
        elif isinstance(n,ast.Import):
            for a in n.names:
                if a.name in mods and "." not in a.name: names[a.asname or a.name]=mods[a.name]
    for n in ast.walk(t):
        used=None
        if isinstance(n,ast.Attribute) and isinstance(n.value,ast.Name) and n.value.id in names: used=(n.value.id,n.attr)
        elif isinstance(n,ast.Call) and isinstance(n.func,ast.Attribute) and n.func.attr=="setattr" and len(n.args)>=2 and isinstance(n.args[0],ast.Name) and n.args[0].id in names and isinstance(n.args[1],ast.Constant): used=(n.args[0].id,n.args[1].value)
        if used:
            ok=False
            for c in names[used[0]]:
                if c not in cache: cache[c]=top(c)
                ok|=used[1] in cache[c]
            if not ok and used[1] not in("__file__","__name__"): print(f,n.lineno,*used)
