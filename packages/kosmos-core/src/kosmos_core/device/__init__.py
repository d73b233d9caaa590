"""Device functions that every KOSMOS kernel is built from.

Nothing in this folder imports torch: it holds `@triton.jit` functions, NamedTuple structs of
pointers, integers and constexprs, and constants shared with the host. Ordered atomics live in
`flags`, `queue` and `barrier`; polls of data in `sentinel`; vendor differences in `target`.
"""
