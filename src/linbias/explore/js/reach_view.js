export function mountReach(root, data) {
  root.append(String(data));
}
