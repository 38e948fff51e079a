"""Training by a recipe: started (:mod:`.launch`, :mod:`.detached`), on one rank (:mod:`.train`), begun anew or at a
checkpoint that is whole (:mod:`.beginning`, :mod:`.sealed`)."""
