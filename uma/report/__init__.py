"""What is shown: text, and JSON documents of one schema."""

SCHEMA_VERSION = 1
