"""Stops and resumes a script, and says whether it goes on as if nothing had happened, and else what is lost."""

#: Seconds that ranks have to end by themselves after SIGTERM, before they are killed.
GRACE_S = 10.0
#: Steps of the undisturbed run, where nobody says how many.
STEPS = 8
