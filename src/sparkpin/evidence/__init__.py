"""Evidence for others: what a release was made from, as SBOM and signed statement, and the checks over it."""
