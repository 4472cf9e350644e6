"""Plans as JSON, the methods that show a plan, and the consistency checks of loaded plans."""
