"""`sglang-pd plan`: which prefill rank sends what to which decode rank, and whether that works.

sizes           how a server splits a model, from text such as `tp=4,pp=2`
model           what a model keeps of each token, from its config.json
hybrids         which layers have a sliding window or recurrent state
pair            two servers of a model: what each of their ranks holds
links           which rank sends what to which, by the core that the engine runs
known_failures  what stock engines are known to do, under which `conditions`
verdict         whether the pair works, stock and patched
summary         all results, as figures
show            output as tables and as JSON
picture         a drawing, each server as a `grid`
"""
