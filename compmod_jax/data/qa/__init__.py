"""Questions and answers in one format, from the project's own files and from published sets."""
