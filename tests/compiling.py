"""How tests compile: tiny programs run once or twice are not worth optimising."""

QUICK_COMPILE = {"xla_backend_optimization_level": 0}
"""For `jax.jit(..., compiler_options=...)`: halves the time to compile on CPU."""
