"""`invoke report`: what is known of the releases, on one page that needs nothing but itself (docs/report.md)."""
