"""The book: chapters as rooms (:mod:`.chapters`), what their pages share (:mod:`.page`), and running it (:mod:`.run`).

Nothing of it is needed to use the engines.
"""
