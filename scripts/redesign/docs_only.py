"""usage: docs_only.py FILE...: each must equal its committed version (in /work/wt/w31) but for docstrings and comments, with lines of at most 100 characters."""
import ast,subprocess,sys,pathlib
root=pathlib.Path("/work/wt/w31")
def strip(t):
    for n in ast.walk(t):
        if isinstance(n,(ast.Module,ast.ClassDef,ast.FunctionDef,ast.AsyncFunctionDef)) and n.body and isinstance(n.body[0],ast.Expr) and isinstance(n.body[0].value,ast.Constant) and isinstance(n.body[0].value.value,str):
            n.body[0].value.value=""
    return ast.dump(t)
bad=0
for f in sys.argv[1:]:
    f=str(pathlib.Path(f).resolve().relative_to(root))
    old=subprocess.run(["git","show","HEAD:"+f],cwd=root,text=True,capture_output=True,check=True).stdout
    new=(root/f).read_text()
    if strip(ast.parse(old))!=strip(ast.parse(new)): print("CODE DIFFERS",f); bad=1
    for n,l in enumerate(new.splitlines(),1):
        if len(l)>100: print(f"{f}:{n}: {len(l)} characters"); bad=1
print("ok" if not bad else "not ok")
