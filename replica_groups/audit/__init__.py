"""Audits of contributions: scores by loss (Gauntlet), and recomputation of replicas' rounds."""
