"""The report: it judges each paper's ledger.yaml by our records and writes the pages. It only reads files."""
