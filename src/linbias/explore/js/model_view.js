export function mountModel(root, data) {
  root.append(String(data));
}
