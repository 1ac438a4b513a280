"""Apply renaming tables to a worktree. Usage: rename.py ROOT TABLE... ; `--dry` only reports."""
import io, re, subprocess, sys, tokenize, fnmatch, pathlib, collections
root=pathlib.Path(sys.argv[1]); tables=[a for a in sys.argv[2:] if a!="--dry"]
SHORT={"E23/":"python/engines/0.5.23/sglang/srt/disaggregation/","EB/":"python/engines/before_0.5.20/sglang/srt/disaggregation/",
"E9/":"python/engines/0.5.9/sglang/srt/disaggregation/","S/":"python/sglang/srt/disaggregation/","NPU/":"python/sglang/srt/hardware_backend/npu/",
"T23/":"test/engine/since_0.5.20/","TB/":"test/engine/before_0.5.20/","TE/":"test/engine/","TS/":"test/support/","TT/":"test/transport/","TV/":"test/serving/","U/":"test/unit/"}
def full(g):
    for s,f in SHORT.items():
        if g.startswith(s): return f+g[len(s):]
    return g
files=subprocess.run(["git","ls-files"],cwd=root,text=True,capture_output=True,check=True).stdout.split()
TEXT=(".py",".toml",".md",".sh",".c",".yml",".yaml",".txt",".json")
files=[f for f in files if f.endswith(TEXT) or f in (".ci/run",)]
text={f:(root/f).read_text() for f in files}
orig=dict(text)
rows=[]; moves=[]
for t in tables:
    for n,line in enumerate(open(t),1):
        line=line.rstrip("\n")
        if not line.strip() or line.startswith("#"): continue
        p=line.split("\t")
        if len(p)!=3: print(f"{t}:{n}: bad row {line!r}"); continue
        scope,old,new=p
        if old==new: continue
        if scope=="file": moves.append((full(old),full(new))); continue
        rows.append((t,n,scope,old,new))
miss=[]
SKIP=("CHANGELOG.md","docs/evidence/")
def star(old,new):
    pat=re.compile(r"(?<![A-Za-z0-9_])"+re.escape(old)+r"(?![A-Za-z0-9_])")
    c=0
    for f,s in text.items():
        if f.startswith(SKIP): continue
        s2,k=pat.subn(lambda m:new,s)
        if k: text[f]=s2; c+=k
    return c
def toks(f,old,new,mode):
    s=text[f]
    if not re.search(r"(?<![A-Za-z0-9_])"+re.escape(old)+r"(?![A-Za-z0-9_])",s): return 0
    if not f.endswith(".py"):
        s2,k=re.subn(r"(?<![A-Za-z0-9_])"+re.escape(old)+r"(?![A-Za-z0-9_])",new,s); text[f]=s2; return k
    lines=s.splitlines(keepends=True); edits=[]; prev=None; prev2=None
    try: tl=list(tokenize.generate_tokens(io.StringIO(s).readline))
    except Exception as e: print("tokenize",f,e); return 0
    k=0
    import ast
    tree=ast.parse(s); cls=set(); imp=set(); meth=set()
    for n in ast.walk(tree):
        if isinstance(n,ast.ClassDef):
            for b in n.body:
                if isinstance(b,(ast.FunctionDef,ast.AsyncFunctionDef)): meth.add(b.lineno)
                for tg in (b.targets if isinstance(b,ast.Assign) else [b.target] if isinstance(b,ast.AnnAssign) else []):
                    for x in ast.walk(tg):
                        if isinstance(x,ast.Name): cls.add((x.lineno,x.col_offset))
    # positions of module paths in import statements
    i=0
    while i<len(tl):
        t=tl[i]
        if t.type==tokenize.NAME and t.string in("from","import") and (i==0 or tl[i-1].type in(tokenize.NEWLINE,tokenize.NL,tokenize.INDENT,tokenize.DEDENT,tokenize.COMMENT) or tl[i-1].string in(":",";")):
            j=i+1
            while j<len(tl) and tl[j].string!="import" and tl[j].type not in(tokenize.NEWLINE,):
                imp.add(tl[j].start); j+=1
            i=j
        i+=1
    for i,t in enumerate(tl):
        if t.type==tokenize.NAME and t.string==old:
            if t.start in imp: continue
            p=tl[i-1]; dotted=p.string=="."
            isdef=p.string=="def" and t.start[0] in meth
            # class-level attribute: NAME at line start followed by = or :
            nxt=tl[i+1].string if i+1<len(tl) else ""
            clsattr=t.start in cls
            kw=nxt=="=" and p.string in("(",",")
            ok={"py":True,"attr":dotted or isdef or clsattr,"field":dotted or isdef or clsattr or kw,"name":not dotted and not isdef}[mode]
            if ok: edits.append((t.start,t.end)); k+=1
        elif t.type==tokenize.STRING and mode in("py","attr","name","field"):
            m=re.fullmatch(r"([\"'])((?:[\w.]+\.)?)"+re.escape(old)+r"\1",t.string)
            if m:
                r=t.start[0],t.start[1]+1+len(m.group(2))
                edits.append((r,(r[0],r[1]+len(old)))); k+=1
    # f-strings in 3.11 are plain STRING tokens: replace inside braces
        if t.type==tokenize.STRING and t.string[:2].lower() in('f"',"f'","rf","fr") and t.start[0]==t.end[0]:
            for m in re.finditer(r"\{[^{}]*\}",t.string):
                for q in re.finditer(r"(?<![A-Za-z0-9_])"+re.escape(old)+r"(?![A-Za-z0-9_])",m.group()):
                    col=t.start[1]+m.start()+q.start()
                    d=t.string[m.start()+q.start()-1]=="."
                    if mode=="py" or (mode in("attr","field") and d) or (mode=="name" and not d):
                        edits.append(((t.start[0],col),(t.start[0],col+len(old)))); k+=1
    for (r,c),(r2,c2) in sorted(set(edits),reverse=True):
        L=lines[r-1]; lines[r-1]=L[:c]+new+L[c2:]
    text[f]="".join(lines)
    return k
for t,n,scope,old,new in rows:
    if scope=="*": k=star(old,new)
    else:
        mode="py"
        if ":" in scope: mode,scope=scope.split(":",1)
        gl=[full(g.strip()) for g in scope.split(",")]
        k=0
        for f in files:
            if any(fnmatch.fnmatch(f,g) for g in gl): k+=toks(f,old,new,mode)
    if not k: miss.append(f"{t.rsplit('/',1)[-1]}:{n}: {scope} {old} -> {new}: nothing")
for m in miss: print("MISS",m)
changed=[f for f in files if text[f]!=orig[f]]
if "--dry" not in sys.argv:
    for f in changed: (root/f).write_text(text[f])
print(len(rows),"rows",len(changed),"files",len(miss),"missed",len(moves),"moves")
import json; json.dump(moves,open("/tmp/names/moves.json","w"),indent=0)
