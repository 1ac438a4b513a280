"""Which of our methods name their parameters otherwise than the engine's?"""
import ast,sys,pathlib
R=sys.argv[1]
ours=[pathlib.Path(f'/work/wt/w31/python/engines/{R}/sglang'),pathlib.Path('/work/wt/w31/python/sglang')]
eng=pathlib.Path(f'/work/main/.pd-env/{R}/stock/lib/python3.11/site-packages/sglang')
def classes(root,files):
    out={}
    for f in files:
        try: t=ast.parse(f.read_text())
        except Exception: continue
        for c in ast.walk(t):
            if isinstance(c,ast.ClassDef):
                out.setdefault(c.name,[]).append((str(f.relative_to(root)),c))
    return out
E=classes(eng,[f for d in ('srt/disaggregation','srt/hardware_backend','srt/managers','srt/mem_cache') for f in (eng/d).rglob('*.py')])
O={}
for r in ours:
    for k,v in classes(r,list(r.rglob('*.py'))).items(): O.setdefault(k,[]).extend(v)
def bases(c): return [ast.unparse(b).split('.')[-1].split('[')[0] for b in c.bases]
def params(fn):
    a=fn.args; pos=[x.arg for x in a.posonlyargs+a.args]; nd=len(a.defaults)
    return dict(pos=pos,kw=[x.arg for x in a.kwonlyargs],var=a.vararg and a.vararg.arg,kwargs=a.kwarg and a.kwarg.arg,nreq=len(pos)-nd)
def methods(c): return {f.name:f for f in c.body if isinstance(f,(ast.FunctionDef,ast.AsyncFunctionDef))}
def eng_method(name,m,seen=()):
    for f,c in E.get(name,[]):
        ms=methods(c)
        if m in ms: return name,ms[m]
        for b in bases(c):
            if b!=name and b not in seen:
                r=eng_method(b,m,seen+(name,))
                if r: return r
# a mixin: engine classes = those of patched classes that derive from it
users={}
for n,l in O.items():
    for f,c in l:
        for b in bases(c): users.setdefault(b,set()).add(n)
def targets(n,seen=()):
    t={n} if n in E else set()
    for u in users.get(n,()):
        if u not in seen: t|=targets(u,seen+(n,))
    return t
for n,l in sorted(O.items()):
    for f,c in l:
        for m,fn in methods(c).items():
            if m in('__new__',): continue
            for t in sorted(targets(n)):
                r=eng_method(t,m)
                if not r: continue
                a,b=params(r[1]),params(fn)
                msg=[]
                for i,p in enumerate(a['pos'][1:],1):
                    if i<len(b['pos']):
                        if b['pos'][i]!=p and not(p in b['pos'] ): msg.append(f'{p}->{b["pos"][i]}')
                        elif b['pos'][i]!=p: msg.append(f'order {p}')
                    elif b['var']:
                        if not b['kwargs'] : msg.append(f'{p} not by name')
                    elif p in b['kw']: msg.append(f'{p} only by name')
                    else: msg.append(f'{p} missing')
                for p in a['kw']:
                    if p not in b['pos']+b['kw'] and not b['kwargs']: msg.append(f'kw {p} missing')
                for i,p in enumerate(b['pos'][1:b['nreq']],1):
                    if i>=a['nreq'] and i<len(a['pos']): msg.append(f'{p} required')
                if msg: print(f'{f}: {n}.{m} [{t}/{r[0]}]:',', '.join(dict.fromkeys(msg)))
