"""What a model costs: parameters and multiply-adds (`flops`, `adapted`), and time and memory on a device (`speed`,
`op_rate`).
"""
