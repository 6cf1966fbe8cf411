// A tour of the view in steps: each is a state of it, and a sentence on what to look at.

export const STEPS = [
  {
    id: "sum",
    label: "Scores plus bias",
    says: "Every cell of the first matrix gets the bias of its place in the second, which is lower the further a key stands from the query. "
      + "Softmax makes weights of each row of sums.",
    state: {},
  },
  {
    id: "plain",
    label: "Slope 0 is plain attention",
    says: "With slope 0 the bias is 0 everywhere: the weights follow q \u00b7 k alone, however far apart two words stand. Move the slope up from here.",
    state: { left: { 0: 0 } },
  },
  {
    id: "row",
    label: "One word\u2019s row",
    says: "The query of \u201con\u201d is all zeros, so all its scores are 0 and the bias alone decides: most weight on itself, less with every step away.",
    state: { row: 3 },
  },
  {
    id: "future",
    label: "Hide the future",
    says: "A language model may not read ahead: keys after the query are hidden (hatched), and each row shares its weight among the words so far.",
    state: { variant: "causal", row: 4 },
  },
  {
    id: "heads",
    label: "A steep and a flat head",
    says: "Eight heads with the paper\u2019s slopes, from 1/2 to 1/256. Choose among the small pictures: head 0 sees the nearest words, head 7 nearly all alike.",
    state: { numHeads: 8, schedule: "paper", variant: "causal", words: 8, row: 7 },
  },
];
