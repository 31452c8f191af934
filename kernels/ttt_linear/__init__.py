"""TTT-Linear, the inner learner of Vision-TTT: `op` has the functions, `reference` the equations."""

from .op import selected_backend, ttt_linear, ttt_linear_bidir

__all__ = ["selected_backend", "ttt_linear", "ttt_linear_bidir"]
