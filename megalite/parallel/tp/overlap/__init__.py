"""How a tp linear's collective and its GEMM run together: base.py has the four functions, choose.py the choice."""
