// expect: no such message
// Fails, for another reason than the stated one.
#ifdef HBMOFF_TWIN
int main() {}
#else
int main() { return undeclared; }
#endif
