"""The documentation site: what MkDocs needs besides the Markdown in docs/."""
