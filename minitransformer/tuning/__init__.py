"""Choice of kernel under proof: candidates are held to the spec's bits first, then timed; a table keeps the fastest.

    machine.py   what this machine is, and whether what runs on it was verified
    proof.py     operands that show a wrong order of a sum, and the first element that differs
    table.py     the table: which schedule or library for which shape, on which machine
    judge.py     candidates, and who is refused or fastest
    subject.py   a product on a GPU: operands, reference, candidates, clock
    tune.py      makes and verifies a table
    selfcheck/   every operator on small inputs, on the CPU and on a GPU
    reverify.py  when the self-checks run by themselves, and what follows
    origin.py    what a measured number is of
    checks.py    what `minitransformer doctor` finds out
"""
