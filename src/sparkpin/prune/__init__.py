"""`invoke prune`: which releases and files nothing needs any more, and their removal."""
