"""The chapters, one folder each: drawings, figures, exercises with their solutions, claims, and its own measurements.

A notebook imports the modules of its chapter, as any others, and makes its :class:`pardemo.book.page.Page`.
"""

from pardemo import extras

extras.require(__name__, "matplotlib")
