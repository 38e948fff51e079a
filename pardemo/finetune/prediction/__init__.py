"""What is done with a fine-tuned model: answers for a file of rows (:mod:`.predict`), or in a conversation
(:mod:`.chat`), both by :mod:`.decoding`."""
