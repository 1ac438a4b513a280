"""Move files/folders and follow: paths in texts, imports, uses of imported modules."""
import io,re,subprocess,sys,tokenize,pathlib,json
root=pathlib.Path(sys.argv[1]); moves=[]
SHORT={"E23/":"python/engines/0.5.23/sglang/srt/disaggregation/","EB/":"python/engines/before_0.5.20/sglang/srt/disaggregation/","E9/":"python/engines/0.5.9/sglang/srt/disaggregation/","S/":"python/sglang/srt/disaggregation/","NPU/":"python/sglang/srt/hardware_backend/npu/"}
def full(g):
    for s,f in SHORT.items():
        if g.startswith(s): return f+g[len(s):]
    return g
for t in sys.argv[2:]:
    for l in open(t):
        p=l.rstrip("\n").split("\t")
        if p[0]=="file" and p[1]!=p[2]: moves.append((full(p[1]).rstrip("/"),full(p[2]).rstrip("/")))
git=lambda *a: subprocess.run(["git",*a],cwd=root,check=True,text=True,capture_output=True).stdout
for old,new in moves:
    if not (root/old).exists(): print("NO",old); continue
    (root/new).parent.mkdir(parents=True,exist_ok=True)
    git("mv",old,new)
files=[f for f in git("ls-files").split() if f.endswith((".py",".toml",".md",".sh",".c",".yml",".yaml",".txt",".json"))]
def engine_tail(p):
    m=re.match(r"python/(?:engines/[^/]+/)?sglang/(srt/.*)",p); return m and m.group(1)
subs=[]; mods=[]   # text subs; (old dotted, new dotted)
for old,new in moves:
    to,tn=engine_tail(old),engine_tail(new)
    if to:
        a,b=to.split("/"),tn.split("/")
        keep=[i for i in range(len(a)) if True]
        # parent/file forms
        subs.append((a[-2]+"/"+a[-1],b[-2]+"/"+b[-1]))
        da,db=".".join(a)[:-3],".".join(b)[:-3]
        mods.append(("sglang."+da,"sglang."+db))
        subs.append((a[-2]+"."+a[-1][:-3],b[-2]+"."+b[-1][:-3]))
    else:
        subs.append((old,new))
        if old.endswith(".py"):
            if old.startswith("python/"):
                mods.append((old[7:-3].replace("/","."),new[7:-3].replace("/",".")))
            else: mods.append((pathlib.Path(old).stem,pathlib.Path(new).stem))
        elif old.startswith("python/"):
            mods.append((old[7:].replace("/","."),new[7:].replace("/",".")))
print(len(subs),len(mods))
W=r"(?<![A-Za-z0-9_])"; E=r"(?![A-Za-z0-9_])"
for f in files:
    p=root/f
    if f.startswith(("CHANGELOG","docs/evidence")): continue
    s=o=p.read_text()
    for a,b in subs: s=re.sub(r"(?<![A-Za-z0-9_.\-])"+re.escape(a)+E,b,s) if "/" in a else re.sub(W+re.escape(a)+E,b,s)
    if f.endswith(".py"):
        for a,b in mods:
            pa,_,ma=a.rpartition("."); pb,_,mb=b.rpartition(".")
            used=None
            if pa:
                s=re.sub(W+re.escape(a)+E,b,s)
                # from PARENT import (...) ma
                def r(m):
                    global hit
                    if re.search(W+ma+E,m.group(2)):
                        hit=True; return m.group(1)+re.sub(W+ma+E,mb,m.group(2))
                    return m.group(0)
                hit=False
                s=re.sub(r"((?:from )"+re.escape(pa)+r" import )(\((?:[^)]*)\)|[^\n]*)",r,s) 
                # relative imports in the same package
                if ma!=mb:
                    s=re.sub(r"(from \.)"+ma+E,r"\g<1>"+mb,s)
                    used=hit
            elif re.search(r"^\s*(?:import "+ma+r"\b|from "+ma+r" import)",s,re.M):
                s=re.sub(r"^(\s*from )"+ma+r"( import)",r"\g<1>"+mb+r"\2",s,flags=re.M)
                if re.search(r"^\s*import "+ma+r"\b",s,re.M):
                    s=re.sub(r"^(\s*import )"+ma+r"\b",r"\g<1>"+mb,s,flags=re.M); used=True
            if used and ma!=mb:
                # module used as NAME. or as bare argument
                tl=list(tokenize.generate_tokens(io.StringIO(s).readline)); L=s.splitlines(keepends=True); ed=[]
                for i,t in enumerate(tl):
                    if t.type==tokenize.NAME and t.string==ma and tl[i-1].string!="." : ed.append(t.start)
                    elif t.type==tokenize.STRING and re.fullmatch(r"[\"']"+ma+r"\.\w+[\"']",t.string): ed.append((t.start[0],t.start[1]+1))
                for rr,c in sorted(ed,reverse=True):
                    x=L[rr-1]; L[rr-1]=x[:c]+mb+x[c+len(ma):]
                print("module used",f,ma,mb,len(ed)); s="".join(L)
    if s!=o: p.write_text(s)
