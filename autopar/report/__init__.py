"""Reports of a plan: text, HTML and pictures."""
