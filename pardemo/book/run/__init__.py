"""Running the book: notebooks through papermill, claims gathered, report, site, and the run that is committed."""
