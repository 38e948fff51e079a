"""The frameworks to compare with, a package or module each, and what starts their processes (:mod:`.launchers`)."""
