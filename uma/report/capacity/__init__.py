"""The capacity report: one document of facts, shown as JSON, Markdown, HTML and pictures."""
