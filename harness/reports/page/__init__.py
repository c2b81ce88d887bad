"""`report.html`: a run as one file that opens from a disk, asks no network for anything and shows every sample."""

from harness.reports.page.past import PastRun
from harness.reports.page.write import write_page

__all__ = ["PastRun", "write_page"]
