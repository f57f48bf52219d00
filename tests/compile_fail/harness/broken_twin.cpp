// expect: undeclared
// Fails as stated, but so does its twin: the reason lies elsewhere.
int main() { return undeclared; }
