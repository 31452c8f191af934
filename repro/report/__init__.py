"""The report: judges each paper's ledger.yaml by our records and writes the pages. Its only inputs are files."""
