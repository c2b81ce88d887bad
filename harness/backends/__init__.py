"""Whatever answers requests, behind one contract."""
