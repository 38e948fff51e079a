"""Reports on a script: on a screen, on a page, in drawings and files."""
