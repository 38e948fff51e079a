from pardemo.headlines.grammar import corpus, generate
