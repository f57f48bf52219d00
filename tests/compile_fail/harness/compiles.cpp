// expect: anything
// Compiles; the harness has to say so.
int main() {}
