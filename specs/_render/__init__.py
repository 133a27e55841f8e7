"""What the mkdocs hook is made of: read the records, judge their freshness, write HTML."""
