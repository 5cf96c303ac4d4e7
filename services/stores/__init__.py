"""Files, vector stores and conversations: what tenants bring along."""
