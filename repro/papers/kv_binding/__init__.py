"""The paper "Test-Time Training with KV Binding Is Secretly Linear Attention"."""
