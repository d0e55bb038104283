"""The driver: expand, plan, run, record, summarise."""
