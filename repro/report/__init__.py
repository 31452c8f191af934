"""The report: it judges each paper's ledger (ledger.yaml) by our records and writes results/tables.md. It only reads
files.
"""
