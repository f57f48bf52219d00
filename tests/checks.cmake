# Tests that read or compile sources instead of running a program.
