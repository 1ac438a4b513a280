import ast,sys,subprocess,pathlib,collections
old=pathlib.Path("/work/main"); new=pathlib.Path("/work/wt/w31")
subprocess.run(["git","add","-A"],cwd=new)
out=subprocess.run(["git","diff","--cached","-M30%","--name-status","9fd0997"],cwd=new,text=True,capture_output=True).stdout
pairs=[]
for l in out.splitlines():
    p=l.split("\t")
    if p[0].startswith("R"): pairs.append((p[1],p[2]))
    elif p[0]=="M": pairs.append((p[1],p[1]))
    else: print("STATUS",l)
strs=collections.Counter(); bad=0
def names(n):
    # (field,value) identifier fields
    for f in ("id","attr","name","arg","asname","module"):
        v=getattr(n,f,None)
        if isinstance(v,str): yield f,v
def walk(a,b,maps,path,scope):
    global bad
    if type(a)!=type(b): print("TYPE",path,getattr(a,"lineno",0),type(a).__name__,type(b).__name__); bad+=1; return
    if isinstance(a,(ast.Import,ast.ImportFrom)): return
    na,nb=dict(names(a)),dict(names(b))
    for f in na:
        if f in nb and na[f]!=nb[f]: maps[scope].setdefault(na[f],set()).add(nb[f])
        elif f in nb: maps[scope].setdefault(na[f],set()).add(nb[f])
    if isinstance(a,ast.Constant):
        if a.value!=b.value:
            if isinstance(a.value,str): strs[(path,a.value[:150],b.value[:150])]+=1
            else: print("CONST",path,a.lineno,a.value,b.value); bad+=1
        return
    if isinstance(a,(ast.Global,ast.Nonlocal)):
        for x,y in zip(a.names,b.names): maps[scope].setdefault(x,set()).add(y)
    sc=scope
    if isinstance(a,(ast.FunctionDef,ast.AsyncFunctionDef,ast.ClassDef)): sc=scope+"."+a.name; maps.setdefault(sc,{})
    for f in a._fields:
        x,y=getattr(a,f),getattr(b,f)
        if isinstance(x,list):
            x=[i for i in x if not isinstance(i,(ast.Import,ast.ImportFrom))]; y=[i for i in y if not isinstance(i,(ast.Import,ast.ImportFrom))]
            if len(x)!=len(y): print("LEN",path,getattr(a,"lineno",0),f,len(x),len(y)); bad+=1; continue
            for i,j in zip(x,y):
                if isinstance(i,ast.AST): walk(i,j,maps,path,sc)
        elif isinstance(x,ast.AST):
            if y is None: print("NONE",path); bad+=1
            else: walk(x,y,maps,path,sc)
for o,n in pairs:
    if not n.endswith(".py"): continue
    a=ast.parse((old/o).read_text()); b=ast.parse((new/n).read_text())
    maps={"":{}}
    walk(a,b,maps,n,"")
    for sc,m in maps.items():
        inv=collections.defaultdict(set)
        for x,ys in m.items():
            if len(ys)>1: print("SPLIT",n,sc,x,ys)
            for y in ys: inv[y].add(x)
        for y,xs in inv.items():
            if len(xs)>1: print("MERGE",n,sc,y,xs)
import json
json.dump([[*k,v] for k,v in strs.items()],open("/tmp/names/strs.json","w"),indent=0)
print(len(pairs),"pairs",bad,"bad",len(strs),"strings differ")
