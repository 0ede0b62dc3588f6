"""A release for others: what it was made from (SBOM, signed statement), and its way to another machine and back."""
