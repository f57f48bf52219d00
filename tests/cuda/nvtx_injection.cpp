// Where NVTX looks for a tool that is linked in. NVTX's own headers define the pointer as well, weakly, so this is a file
// of its own.
struct nvtxExtModuleInfo_t;

extern "C" {
int attach_nvtx_tool(nvtxExtModuleInfo_t* module);
extern int (*InitializeInjectionNvtxExtension_fnptr)(nvtxExtModuleInfo_t*);
int (*InitializeInjectionNvtxExtension_fnptr)(nvtxExtModuleInfo_t*) = &attach_nvtx_tool;
}
