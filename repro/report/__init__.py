"""The report: the ledger of the paper's numbers (paper.yaml), their status beside ours, results/tables.md. Reads files only."""
