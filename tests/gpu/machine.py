def measure(facts):
    pass
