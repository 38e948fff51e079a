"""What the colours of all drawings and charts mean. Okabe & Ito's set, which colour-blind readers tell apart."""

#: Of what a rank keeps.
KEPT = {
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer states": "#009E73",
    "activations": "#CC79A7",
}
#: Of what a rank does.
DONE = {"forward": "#56B4E9", "backward": "#7A68B3", "communication": "#D55E00", "idle": "#DDDDDD"}
#: Whose something is: light, so that dark text can stand on them; the rank's number stands beside.
RANKS = ("#A6CEE3", "#FDBF6F", "#B2DF8A", "#CAB2D6", "#FB9A99", "#FFFF99", "#D9D9D9", "#E0B48C")

INK = "#1A1A1A"  # text on a colour, in a dark page too


def rank_colour(rank: int) -> str:
    return RANKS[rank % len(RANKS)]
