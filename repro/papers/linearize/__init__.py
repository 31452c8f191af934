"""The paper "Linearizing Vision Transformer with Test-Time Training", whose model is T5 (Transformer to TTT)."""
