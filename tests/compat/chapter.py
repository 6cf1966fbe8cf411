"""Tables that the book chapter prints of its example, "The cat sat on mat"."""

# Weights of both heads and their mean, outputs, scores of head 1 without bias.
HEADS = """
The 0.2879 0.3541 0.2148 0.0642 0.0790
cat 0.3791 0.1520 0.3791 0.0559 0.0339
sat 0.1003 0.1653 0.5527 0.0815 0.1003
on 0.0796 0.1312 0.2163 0.3566 0.2163
mat 0.0341 0.1140 0.1880 0.1528 0.5110

The 0.2142 0.3384 0.1299 0.2052 0.1122
cat 0.3002 0.1901 0.1480 0.2338 0.1279
sat 0.1077 0.2806 0.1776 0.2806 0.1534
on 0.1106 0.1421 0.0899 0.4750 0.1824
mat 0.1545 0.0978 0.1256 0.3271 0.2949

The 0.2510 0.3462 0.1724 0.1347 0.0956
cat 0.3397 0.1710 0.2636 0.1449 0.0809
sat 0.1040 0.2229 0.3652 0.1810 0.1268
on 0.0951 0.1366 0.1531 0.4158 0.1994
mat 0.0943 0.1059 0.1568 0.2400 0.4030
"""
OUTPUT = """
The 0.3274 0.3936 0.1861 0.2613
cat 0.3961 0.1689 0.2120 0.2977
sat 0.1504 0.2154 0.2544 0.3573
on 0.1877 0.2393 0.1811 0.5662
mat 0.2896 0.3695 0.2731 0.4746
"""
SCALED = """
The 0.0000 0.7071 0.7071 0.0000 0.7071
cat 1.4142 0.0000 1.4142 0.0000 0.0000
sat 0.7071 0.7071 1.4142 0.0000 0.7071
on 0.0000 0.0000 0.0000 0.0000 0.0000
mat 0.0000 0.7071 0.7071 0.0000 0.7071
"""


def chapters_table(text: str) -> list[list[str]]:
    """Lines of words as rows of cells."""
    return [line.split() for line in text.strip().splitlines()]


def numbers(table: str) -> list[list[float]]:
    """The rows of a table without their names."""
    return [[float(cell) for cell in row[1:]] for row in chapters_table(table)]
