"""A plan in other forms: as JSON, and as it is shown; what holds in every plan."""
