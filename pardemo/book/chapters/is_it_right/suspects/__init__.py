"""Scripts to mend: each trains rightly in one process, and wrongly on more ranks. Texts; nothing imports them."""
